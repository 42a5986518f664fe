"""Programs that run inside the grading sandbox, as text. They stand alone and are never imported by the daemon."""
