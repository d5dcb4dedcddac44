"""Ctrl-C is delivered, also where the tests were started in the background of a shell, which has
it ignored by all that it starts there."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
