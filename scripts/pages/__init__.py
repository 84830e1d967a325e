"""What book.py is made of: notebooks are executed, and their outputs made fit for a page."""
