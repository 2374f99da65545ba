"""Tests of hivebash, with trial on the asyncio reactor."""

import signal

# A shell starts what it puts into the background with these ignored, nohup one, and what the tests start would inherit
# that.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)
