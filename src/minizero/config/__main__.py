"""`python -m minizero.config`: a file explained key by key."""

from minizero.config import main

main()
