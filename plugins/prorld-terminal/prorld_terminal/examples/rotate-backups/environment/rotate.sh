#!/bin/bash
# Keeps the newest backups of a directory, and deletes the others.
cd $1
for file in `ls backup-*.tar | head -n $2`; do
    rm $file
done
