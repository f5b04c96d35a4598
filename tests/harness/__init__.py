"""All that is no test: fixtures, cases, servers, drivers, the simulated GPU."""
