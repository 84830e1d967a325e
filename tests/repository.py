"""Where the files of the project are, whichever folder a test lies in."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
