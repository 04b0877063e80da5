# needs: weft
# seconds: 300
# The cases of tests/conformance/c/mr on rxe0, each of which tests a sentence of fi_mr(3)
# (docs/conformance.md): sub-regions, application keys, counted events, memory that is mapped later.
# Those on sub-regions; WEFT_VM_ALL=1: all 269 runs.
sentence() { # PROGRAM CASE FORM
	out=/tmp/out-$1-$2-$3
	FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH=$WEFT_DIR FI_PROVIDER=weft WEFT_TEST_NODE=10.77.0.1 WEFT_TEST_PINS=1 \
		timeout 120 "$WEFT_PROJECT/build/vm/mr/$1" "$2" "$3" >"$out" 2>&1 </dev/null
	status=$?
	case $status in
	0) echo "ok   $1 $2 $3" ;;
	77) echo "none $1 $2 $3: $(tail -1 "$out")" ;; # the sentence does not apply to this form
	*)
		echo "FAIL $1 $2 $3: status $status"
		tail -10 "$out"
		;;
	esac
	rm "$out"
}

run() {
	export -f sentence
	export WEFT_DIR WEFT_PROJECT
	programs=parts
	[ -n "$WEFT_VM_ALL" ] && programs="attrs cache close durable events keys memory odd parts refresh shared"
	for program in $programs; do
		[ -x "$WEFT_PROJECT/build/vm/mr/$program" ] || { echo "$program is not built: libfabric 2.1 cannot be downloaded"; continue; }
		"$WEFT_PROJECT/build/vm/mr/$program" --list | sed "s/^/$program /" || return 1
	done >/tmp/sentences
	# two at a time: the guest has two processors
	xargs -P 2 -n 3 bash -c 'sentence "$0" "$1" "$2"' </tmp/sentences | tee /tmp/results
	echo "$(grep -c '^ok ' /tmp/results) hold, $(grep -c '^none ' /tmp/results) do not apply, $(grep -c '^FAIL ' /tmp/results) fail"
	[ "$(grep -cE '^(ok|none) ' /tmp/results)" = "$(wc -l </tmp/sentences)" ] && [ "$(grep -c '^ok ' /tmp/results)" -ge 20 ]
}
