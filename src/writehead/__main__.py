"""The entry point of the command line, for `writehead` and `python -m writehead`."""

import signal


def main() -> None:
    """Runs the command line; Ctrl-C prints no traceback, even during imports and at exit."""
    # a SIGINT that is ignored, as in a background job, stays ignored
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
