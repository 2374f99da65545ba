"""Tests of hivebash, with trial on the asyncio reactor."""

import signal

# A shell starts what it puts into the background with these ignored, and what the tests start would inherit that.
for _number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler)
