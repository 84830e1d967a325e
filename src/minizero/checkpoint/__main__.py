"""`python -m minizero.checkpoint`: one file of a sharded checkpoint."""

from minizero.checkpoint.one_file import main

main()
