"""`python -m minillm` is the `minillm` command."""

from minillm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
