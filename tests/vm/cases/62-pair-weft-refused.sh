# guest: pair
# needs: weft
# seconds: 120
# Writes of RDM endpoints that the device of guest b refuses, while the acknowledgements of guest b
# take 30 ms longer than its other packets. Guest b disconnects after a refusal, so the disconnect
# request arrives before the negative acknowledgement. The error is that of the refusal.
b() {
	slow_answers && signal slow || return 1
	FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/refused" -s weft "$(rxe_addr4)" 5003 "$(peer_addr4):5001"
	status=$?
	answers_were_slow 20 && return $status
}
a() {
	await slow 60 || return 1
	FI_WEFT_DEVICE=rxe0 with weft "$WEFT_PROJECT/build/vm/refused" weft "$(rxe_addr4)" 5001 "$(peer_addr4):5003"
}
