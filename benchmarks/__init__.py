"""The measurements behind every figure in the docs: each module measures, and renders its section of the pages."""
