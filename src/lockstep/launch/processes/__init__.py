"""Local processes: forked from a server, given a call, watched until they end."""
