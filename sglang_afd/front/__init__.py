"""``--afd-restart``: a process that keeps the HTTP port and the requests while the world behind it,
the command's server and ranks, is started again."""
