"""Questions of science."""
