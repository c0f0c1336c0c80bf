"""``python -m spec_lab``."""

from spec_lab.entry import main

if __name__ == "__main__":
    main()
