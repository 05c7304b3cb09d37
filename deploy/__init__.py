"""A real federation as processes on one machine, and what is needed to deploy one."""
