"""Whether the tests would notice a wrong program: small changes to modules, one by one."""
