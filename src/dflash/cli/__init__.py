"""The command line: one file per verb, a table of verbs in `main.py`. A client of the engine, never imported by it."""
