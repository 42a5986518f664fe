#!/bin/bash
{
    echo shop,pieces,total
    awk '
        /^#/ || NF == 0 { next }
        $4 == "void" { delete count[$1 " " $2 " " $3]; delete sum[$1 " " $2 " " $3]; next }
        { count[$1 " " $2 " " $3] += $4; sum[$1 " " $2 " " $3] += $4 * $5 }
        END {
            for (key in count) { split(key, part, " "); pieces[part[2]] += count[key]; total[part[2]] += sum[key] }
            for (shop in pieces) print shop "," pieces[shop] "," total[shop]
        }
    ' /app/sales.txt | LC_ALL=C sort
} >/app/report.csv
