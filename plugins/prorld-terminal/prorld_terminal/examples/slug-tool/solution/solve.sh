#!/bin/bash
cat >/app/slug <<'EOF'
#!/bin/bash
max=0
[ "${1:-}" = --max ] && max=$2
LC_ALL=C awk -v max="$max" '
    {
        slug = tolower($0)
        gsub(/[^a-z0-9]+/, "-", slug)
        gsub(/^-|-$/, "", slug)
        if (slug == "") slug = "untitled"
        if (max > 0 && length(slug) > max) {
            head = substr(slug, 1, max)
            if (substr(slug, max + 1, 1) != "-" && head ~ /-/) sub(/-[^-]*$/, "", head)
            sub(/-$/, "", head)
            slug = head
        }
        seen[slug]++
        print (seen[slug] > 1 ? slug "-" seen[slug] : slug)
    }
'
EOF
chmod +x /app/slug
