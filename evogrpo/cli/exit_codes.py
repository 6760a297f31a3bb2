"""What a command's exit code says."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
MOST_STATUS = 255

IN_WORDS = (
    "Exit codes: 0 finished, or stopped by SIGTERM, SIGHUP or SIGUSR1 and saved (--stopped-status changes this one); "
    "1 failed; 2 wrong arguments or settings; 130 stopped by Ctrl-C; 128 + N killed by signal N, e.g. 143 by SIGTERM."
)
