"""The short way in: one line from an environment to its best member, with what users of other libraries expect."""
