"""
List the corners for `make test-compat`, record their results, and write `docs/versions.md` and `compat/TESTED.md`.

    python -m compat names               # list the corners
    python -m compat python NAME         # print the Python version of a corner
    python -m compat constraints NAME    # print the constraints file of a corner, for pip
    python -m compat record NAME XML...  # record JUnit files of pytest; run it with the corner's own Python
    python -m compat page                # write the pages from the results

The first three commands need only Python.
"""

import argparse

from compat import corners


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m compat", description=__doc__.strip().splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("names")
    commands.add_parser("page")
    for name in ("python", "constraints", "record"):
        commands.add_parser(name).add_argument("corner", choices=corners.names())
    commands.choices["record"].add_argument("junit", nargs="+")
    arguments = parser.parse_args()

    if arguments.command == "names":
        print(*corners.names())
    elif arguments.command == "python":
        print(f"python{corners.python(arguments.corner)}")
    elif arguments.command == "constraints":
        print(*corners.constraints(arguments.corner), sep="\n")
    else:
        from compat import results  # needs `packaging`

        if arguments.command == "record":
            results.record(arguments.corner, arguments.junit)
        results.write_pages()


if __name__ == "__main__":
    main()
