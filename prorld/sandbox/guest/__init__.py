"""What runs inside a sandbox. Each file stands alone: the standard library, and any Python from 3.8 on."""
