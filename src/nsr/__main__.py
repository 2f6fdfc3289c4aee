"""``python -m nsr``: the same as the ``nsr`` command."""

from nsr.cli import main

if __name__ == "__main__":
    main()
