"""`python -m impress`: the command, where its script is not on the path."""

from impress.cli.entry import run

if __name__ == "__main__":
    run()
