# Moves trees and files between descriptor 9 and a sandbox. Runs in the image's own bash, with its coreutils; trees travel
# as tar, made and read here where an image has no tar of its own. Exit codes are those of errno where one fits.

missing=2 forbidden=13 occupied=17 not_a_directory=20 directory=21 special=22

check_parent() {
    local parent=${1%/*}
    [[ -d ${parent:-/} ]] || mkdir -p -- "$parent" || exit 1
}

# Nothing is made before somebody is there to see to its end.
await_start() { IFS= read -r -N 1 -u 9 _ || exit 1; }

# upload_file PLACE MARK MODE SIZE
upload_file() {
    exec 2>&9
    await_start
    [[ -d $1 ]] && exit "$directory"
    [[ -e $1 && ! -f $1 ]] && exit "$special"
    check_parent "$1"
    temp=${1%/*}/$2
    trap 'rm -f -- "$temp"' EXIT
    cat <&9 >"$temp" && [[ $(stat -c %s -- "$temp") == "$4" ]] && chmod "$3" -- "$temp" && mv -T -- "$temp" "$1" || exit 1
}

# upload_tree PLACE MARK: the last entry that comes is an empty file MARK; without it the rest is not all there is.
upload_tree() {
    local inside= entries mode
    exec 2>&9
    await_start
    shopt -s nullglob dotglob
    if [[ -d $1 ]]; then
        entries=("$1"/*)
        ((${#entries[@]})) && exit "$occupied"
        inside=1 temp=$1/$2
    else
        [[ -e $1 || -L $1 ]] && exit "$not_a_directory"
        check_parent "$1"
        temp=${1%/*}/$2
    fi
    mkdir -m 700 -- "$temp" || exit 1
    trap 'chmod -R u+rwx -- "$temp" && rm -rf -- "$temp"' EXIT
    if [[ $(type -P tar) ]]; then tar -xpf - -C "$temp" <&9; else untar_into "$temp"; fi || exit 1
    mode=$(stat -c %a -- "$temp")
    chmod u+rwx -- "$temp" && rm -- "$temp/$2" || exit 1
    if [[ $inside ]]; then
        fill "$1" "$temp"/* && rmdir -- "$temp" || exit 1
    else
        chmod "$mode" -- "$temp" && mv -T -- "$temp" "$1" || exit 1
    fi
    trap - EXIT
}

# fill DIRECTORY ENTRY...: a directory that may not be written to can't be moved as it is.
fill() {
    local to=$1 path mode some=()
    shift
    for path; do
        if [[ -d $path && ! -L $path && ! -w $path ]]; then
            mode=$(stat -c %a -- "$path")
            chmod u+w -- "$path" && mv -- "$path" "$to/" && chmod "$mode" -- "$to/${path##*/}" || return 1
        else
            some+=("$path")
        fi
        ((${#some[@]} < 500)) || { mv -- "${some[@]}" "$to/" && some=() || return 1; }
    done
    ((${#some[@]} == 0)) || mv -- "${some[@]}" "$to/"
}

# download PLACE BYTES: a letter and, for a file, its mode; then what there is, of a file at most so many bytes.
download() {
    [[ -e $1 ]] || exit "$missing"
    if [[ -d $1 ]]; then
        cd -- "$1" || exit "$forbidden"
        printf D >&9
        [[ $(type -P tar) ]] && exec tar -cf - . >&9
        { entomb . && zeros 1024; } >&9 || exit "$forbidden"
        exit 0
    fi
    [[ -f $1 ]] || exit "$special"
    [[ -r $1 ]] || exit "$forbidden"
    printf 'F%s\n' "$(stat -L -c %a -- "$1")" >&9
    exec head -c "$2" -- "$1" >&9
}

zeros() {
    if (($1 > 1024)); then head -c "$1" /dev/zero; elif (($1)); then eval "printf '\\0%.0s' {1..$1}"; fi
}

# What tar would write of a directory: ENTOMB DIRECTORY, from inside the tree.
entomb() {
    local path mode size
    shopt -s nullglob dotglob
    bury "$1/" 5 "$(stat -c %a -- "$1")" 0 '' || return 1
    for path in "$1"/*; do
        if [[ -L $path ]]; then
            bury "$path" 2 777 0 "$(readlink -n -- "$path"; printf x)" || return 1
        elif [[ -d $path ]]; then
            entomb "$path" || return 1
        elif [[ -f $path ]]; then
            read -r mode size < <(stat -c '%a %s' -- "$path") && [[ -r $path ]] || return 1
            bury "$path" 0 "$mode" "$size" '' || return 1
            # A file that grows is cut; one that shrinks is filled up, as tar does it.
            head -c "$size" -- "$path" | { cat; zeros "$size"; } 2>/dev/null | head -c "$size"
            zeros $(((512 - size % 512) % 512))
        else
            bury "$path" 6 600 0 '' || return 1
        fi
    done
}

# bury NAME TYPE MODE SIZE LINK: a header; LINK has an x at its end, so that line ends in it survive.
bury() {
    local LC_ALL=C link=${5%x}
    ((${#link} > 100)) && inscribe K "$link"
    ((${#1} > 100)) && inscribe L "$1"
    header "${1:0:100}" "$2" "$3" "$4" "${link:0:100}"
}

inscribe() {
    header ././@LongLink "$1" 644 $((${#2} + 1)) ''
    printf '%s\0' "$2"
    zeros $(((512 - (${#2} + 1) % 512) % 512))
}

header() {
    local byte sum=0
    for byte in $(shape '      ' '  ' "$@" | od -An -v -tu1); do ((sum += byte)); done
    shape "$(printf %06o "$sum")" '\0 ' "$@"
}

shape() {
    printf '%s' "$3"
    zeros $((100 - ${#3}))
    printf "%07o\0%07o\0%07o\0%011o\0%011o\0%s$2%s%s" "0$5" 0 0 "$6" 0 "$1" "$4" "$7"
    zeros $((100 - ${#7}))
    printf 'ustar  \0'
    zeros 247
}

untar_into() {
    local file=$1.header
    (cd -- "$1" && untar "$file")
    local code=$?
    rm -f -- "$file"
    return "$code"
}

# Reads what the daemon sends as tar, in the directory it is called in; FILE is for its own use.
untar() {
    local LC_ALL=C file=$1 name mode size kind link long= longlink= later=() i
    while :; do
        # Into a file first: a field read off the socket by one process could lose bytes that the next one needs.
        head -c 512 <&9 >"$file"
        [[ $(stat -c %s -- "$file") == 512 ]] || return 1
        name=$(at 0 100; printf %sx "$REPLY") mode=$(at 100 8; printf %s "$REPLY") size=$(at 124 12; printf %s "$REPLY")
        kind=$(at 156 1; printf %s "$REPLY") link=$(at 157 100; printf %sx "$REPLY")
        name=${long:-${name%x}} link=${longlink:-${link%x}} size=$((8#${size:-0}))
        [[ $kind ]] || break
        case $kind in
            [LK])
                head -c "$size" <&9 >"$file"
                IFS= read -r -d '' name <"$file"
                [[ $kind == L ]] && long=$name || longlink=$name
                skip "$size"
                continue
                ;;
            0) head -c "$size" <&9 >"$name" && [[ $(stat -c %s -- "$name") == "$size" ]] && chmod "$mode" -- "$name" || return 1 ;;
            2) ln -s -- "$link" "$name" || return 1 ;;
            5) [[ -d $name ]] || mkdir -- "$name" || return 1
                later+=("$mode" "$name") ;;
            *) return 1 ;;
        esac
        skip "$size"
        long= longlink=
    done
    for ((i = ${#later[@]} - 2; i >= 0; i -= 2)); do chmod "${later[i]}" -- "${later[i + 1]}" || return 1; done
}

at() { IFS= read -r -d '' -n "$2" REPLY < <(tail -c +$(($1 + 1)) -- "$file"); }

skip() { head -c $(((512 - $1 % 512) % 512)) <&9 >/dev/null; }
