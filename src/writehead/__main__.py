"""`python -m writehead` is the command line."""

from writehead.cli import main

main()
