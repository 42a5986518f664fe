#!/bin/bash
cat >/app/rotate.sh <<'EOF'
#!/bin/bash
# Keeps the newest backups of a directory, and deletes the others.
set -eu
cd -- "$1"
shopt -s nullglob
files=(backup-[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*.tar)
surplus=$((${#files[@]} - $2))
if [ "$surplus" -gt 0 ]; then
    rm -- "${files[@]:0:surplus}"
fi
EOF
chmod +x /app/rotate.sh
