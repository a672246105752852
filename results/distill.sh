#!/usr/bin/env bash
# Trains a new bundled model by distillation, as docs/distilling.md describes.
#
# Usage: results/distill.sh TEXT [OUTPUT] [STEP …]
#
# TEXT is a folder with a pair of files per corpus, NAME.en and NAME.de, plain or compressed as .xz
# or .gz. A NAME.en without a NAME.de is only translated by the teacher. newstest2013 is for
# development and newstest2014 for testing. New files go to OUTPUT, by default distilled/. The steps
# are prepare, teacher, translate, mix, student, quantize and score; by default, all of them run.
# Finished work is kept, so the same command resumes an interrupted step. The steps teacher,
# translate and student need a GPU, and read only OUTPUT. Compare the scores in
# OUTPUT/results with results/bundled/.
set -euo pipefail
text=$(realpath -m "${1:?usage: results/distill.sh TEXT [OUTPUT] [STEP …]}")
output=$(realpath -m "${2:-distilled}")
shift $(($# < 2 ? $# : 2))
steps=${*:-prepare teacher translate mix student quantize score}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
read -ra teacher <<< "${TEACHER:---preset bundled-teacher/multi-query}"
read -ra student <<< "${STUDENT:---preset bundled/multi-query --set train.steps=30000}"
teacher_vocab=${TEACHER_VOCAB:-16384} student_vocab=${STUDENT_VOCAB:-8192}
scores=$output/results

writehead() { PYTHONPATH=src "$python" -m writehead "$@"; }

# Prints the file of a corpus and language, or nothing: find_text NAME LANGUAGE
find_text() { find -L "$text" -name "$1.$2" -o -name "$1.$2.xz" -o -name "$1.$2.gz"; }

# Lists the names of all corpora to train on.
corpora() {
  find -L "$text" -name '*.en' -o -name '*.en.xz' -o -name '*.en.gz' | sed 's|.*/||; s|\.en.*||' |
    grep -v '^newstest201[34]$' | sort
}

# Prints how many times to include a corpus: news, everyday and interface texts are scarce.
repeat_of() {
  case $1 in
    europarl* | books*) echo 1 ;;
    vscode-ui) echo 2 ;;
    tatoeba | *-chat | *-wiki | *-help) echo 3 ;;
    *) echo 4 ;;
  esac
}

# Sets `pairs` to the options of `prepare` for the human translations of the corpora that are
# included at least this many times: human_pairs TIMES
human_pairs() {
  pairs=()
  for name in $(corpora); do
    if [ -n "$(find_text "$name" de)" ] && [ "$(repeat_of "$name")" -ge "$1" ]; then
      pairs+=(--source "$(find_text "$name" en)" --target "$(find_text "$name" de)")
      pairs+=(--repeat "$(repeat_of "$name")")
    fi
  done
}

# Adds the teacher's translations to `pairs`.
teacher_pairs() {
  for name in $(corpora); do
    pairs+=(--source "$output/sources/$name.en" --target "$output/translated/$name.en")
    pairs+=(--repeat "$(repeat_of "$name")")
  done
}

# Prints a file that may be compressed.
unpack() {
  case $1 in
    *.xz) xz --decompress --stdout "$1" ;;
    *.gz) gzip --decompress --stdout "$1" ;;
    *) cat "$1" ;;
  esac
}

# Makes a dataset of `pairs`: prepare DATASET VOCABULARY
prepare() {
  cut -f 1 src/writehead/bundled/first_lines.tsv > "$output/first-lines.en"
  writehead prepare "$output/$1" "${pairs[@]}" --vocab-size "$2" --split-digits \
    --dev-source "$(find_text newstest2013 en)" --dev-target "$(find_text newstest2013 de)" \
    --exclude "$output/first-lines.en" --exclude "$(find_text newstest2014 en)" \
    --exclude "$(find_text newstest2014 de)" --vary-case 0.1 --vary-copies 0.1
}

# Runs a command that writes a file of scores, unless it exists: score FILE COMMAND …
score() {
  local file=$scores/$1.json
  shift
  [ -s "$file" ] || writehead "$@" --device cpu --output "$file"
}

mkdir -p "$output/sources" "$scores"  # sources are plain text, which bulk jobs write faster
for step in $steps; do
  echo "$step:" >&2
  case $step in
    prepare)
      for name in $(corpora); do
        unpack "$(find_text "$name" en)" > "$output/sources/$name.en"
      done
      human_pairs 1
      prepare teacher-data "$teacher_vocab"
      ;;
    teacher) writehead train "$output/teacher-data" "${teacher[@]}" --run "$output/teacher" ;;
    translate)
      writehead translate "$output/teacher" --input "$output/sources" --output "$output/translated" \
        --beam 4
      ;;
    mix)
      human_pairs 2 # for large corpora, only the teacher's translations
      teacher_pairs
      prepare student-data "$student_vocab"
      ;;
    student) writehead train "$output/student-data" "${student[@]}" --run "$output/student" ;;
    quantize)
      [ -d "$output/en-de" ] ||
        writehead quantize "$output/student" "$output/en-de" --bits 6 --group 32
      ;;
    score)
      news=(--source "$(find_text newstest2014 en)" --reference "$(find_text newstest2014 de)")
      cp "$output/student/train.json" "$scores"
      score float32 evaluate "$output/student" "${news[@]}"
      score quantized evaluate "$output/en-de" "${news[@]}" --quantize none
      score int8 evaluate "$output/en-de" "${news[@]}"
      score first-lines evaluate "$output/en-de" --test-set first-lines
      score before-int8 evaluate "${news[@]}"
      score before-first-lines evaluate --test-set first-lines
      head -n 1000 "$(find_text newstest2014 en)" > "$output/newstest2014-first-1000.en"
      score speed bench translate "$output/en-de" --input "$output/newstest2014-first-1000.en" \
        --no-peers
      ;;
    *)
      echo "unknown step $step; choose from prepare, teacher, translate, mix, student, quantize" \
        "and score" >&2
      exit 2
      ;;
  esac
done
