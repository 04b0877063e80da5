# guest: pair
# needs: weft fabtests
# seconds: 240
# fabtests of endpoints with many peers between two hosts, with verified data. Each test has one
# size: with all sizes they allocate more memory than these guests have.
TESTS="pingpong:64 tagged_pingpong:65536 tagged_bw:4096"
native() { # TEST [ADDRESS]
	export FI_WEFT_DEVICE=rxe0 FI_PROVIDER_PATH="$WEFT_DIR" FI_PROVIDER=^ofi_rxm
	exec "$WEFT_PROJECT/build/vm/fabtests/bin/fi_rdm_${1%:*}" -p weft -I 20 -S "${1#*:}" -v -s "$(rxe_addr4)" $2
}
b() {
	for test in $TESTS; do
		(native "$test") &
		# the port of the endpoint is one of the connection manager, so await_port cannot see it
		sleep 3
		signal "rdm-$test"
		wait $! || return 1
	done
}
a() {
	for test in $TESTS; do
		await "rdm-$test" 120 && (native "$test" "$(peer_addr4)") || return 1
	done
}
