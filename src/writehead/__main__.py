"""The entry point of the command line, for `writehead` and `python -m writehead`."""

import signal


def main() -> None:
    """Runs the command line; Ctrl-C while it is imported, or at exit, leaves no traceback."""
    # where it is ignored, as in a background job, it stays so
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from writehead.cli import main as run

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run()
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
