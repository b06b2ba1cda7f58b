"""The training report: what runs logged, drawn and put in words. Importing it takes neither torch nor matplotlib."""
