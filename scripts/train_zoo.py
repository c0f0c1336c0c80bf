"""Train the bundled models: ``python scripts/train_zoo.py <stage> --work DIR``."""

from spec_lab.train.stages import main

if __name__ == "__main__":
    main()
