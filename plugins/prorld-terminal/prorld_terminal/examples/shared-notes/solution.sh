#!/bin/bash
find /app/notes -type f -empty -delete
find /app/notes -type f -exec chmod 644 {} +
find /app/notes -type d -exec chmod 755 {} +
