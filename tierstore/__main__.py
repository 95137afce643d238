"""`python -m tierstore`, the same as the command `tierstore`."""

from tierstore.cli import main

if __name__ == "__main__":
    main()
