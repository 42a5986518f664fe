"""What runs inside the grading sandbox: standard library alone, any Python from 3.8, and nothing of prorld."""
