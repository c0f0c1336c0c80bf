"""The command line, as ``spec-lab`` and as ``python -m spec_lab``."""

import signal
import sys

from spec_lab.cli import interrupt

PRINTS = {"--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i"}
"""Flags with which Hydra only prints."""


def main() -> None:
    """Run the command line. After Ctrl-C the exit code is 130, even if a library caught the ``KeyboardInterrupt``."""
    interrupt.install(interrupt.Leave())
    if PRINTS & {*sys.argv[1:]} and hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end in silence when the reader does, as in --help | head
    try:
        from spec_lab.cli.main import main as command_line

        command_line()
    except BaseException as error:
        if interrupt.interrupted() or (isinstance(error, SystemExit) and error.code == interrupt.CODE):
            interrupt.end()
        raise


if __name__ == "__main__":
    main()
