"""
Lets griffe, which reads the docstrings for the API page, understand TRL's idiom. An extension of mkdocs.yml.

TRL writes "name (`type` or `type`, *optional*, defaults to `x`):" and refers to other objects with [`Name`]. Griffe
wants the bare type, takes the default from the signature, and knows no such references.

Nothing is imported, so that the site can be built without torch and TRL. Parameters that a docstring gets at import
are on the settings page.
"""

import re

import griffe


PARAMETER = re.compile(r"^( {4}\w+) \((.+?)\):(?= |$)", flags=re.MULTILINE)
PARAMETERS_AT_IMPORT = re.compile(r"^Parameters:\n\s*\{parameters\}", flags=re.MULTILINE)
REFERENCE = re.compile(r"\[`(?:~(?:\w+\.)*)?([\w.]+)`\]")


def with_bare_type(parameter: re.Match) -> str:
    """Return the first line of a parameter as griffe reads it, `name (type | type):`."""
    name, annotation = parameter.groups()
    types = re.split("(?<=`)(?:, | or )(?=`)", annotation.removesuffix(", *optional*").split(", *optional*, ")[0])
    bare = " | ".join(types).replace("`", "").replace("*optional*", "")
    return f"{name} ({bare}):" if bare else f"{name}:"


class TRLDocstrings(griffe.Extension):
    """Rewrites each docstring to what griffe reads of Google's style."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring is None:
            return
        text = PARAMETERS_AT_IMPORT.sub("The parameters are on the page [Settings](settings.md).", obj.docstring.value)
        obj.docstring.value = PARAMETER.sub(with_bare_type, REFERENCE.sub(r"`\1`", text))
