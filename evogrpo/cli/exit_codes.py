"""Exit codes of the commands."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
MOST_STATUS = 255

IN_WORDS = (
    "Exit codes: 0 finished; 1 failed; 2 wrong arguments or settings; 130 stopped by Ctrl-C; 128 + N stopped or killed "
    "by signal N, e.g. 143 by SIGTERM (see --exit-code-on-stop)."
)
