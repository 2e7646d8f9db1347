"""`python -m dflash` = the command `dflash`."""

from dflash.cli.main import main

if __name__ == "__main__":
    main()
