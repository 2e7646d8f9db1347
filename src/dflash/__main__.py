"""The command `dflash`, which is also `python -m dflash`: Ctrl-C ends it with exit code 130 and no traceback.

From here on also while the command line itself is imported, which is most of the time before a verb runs; so nothing is
imported at the top. What a verb does on Ctrl-C is its own.
"""

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells count."""


def main() -> None:
    """Entry point. Ends with `SystemExit`."""
    try:
        from dflash.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
