"""Rows between the roles: the step plan, the Transport protocol and its implementations."""
