"""What a command's exit code says."""

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
MOST_STATUS = 255

IN_WORDS = (
    "exit codes: 0 done, or a run was stopped by SIGTERM, SIGHUP or SIGUSR1 and saved (--stopped-status is another "
    "one); 1 the run or the command failed; 2 the request was refused; 130 stopped by Ctrl-C; 128 + N ended at once by "
    "signal N, e.g. 143 by SIGTERM"
)
