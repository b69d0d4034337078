"""Linux restrictions that an unprivileged process can apply to itself. Imports only the standard library."""
