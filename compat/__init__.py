"""The versions that the package is tested with: corners, their results, and the page in the docs made of both."""
