"""Train the bundled models: ``python scripts/train_zoo.py <stage> --work DIR``."""

from zoo.stages import main

if __name__ == "__main__":
    main()
