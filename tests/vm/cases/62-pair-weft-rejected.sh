# guest: pair
# needs: weft
# seconds: 120
# As 62-pair-weft-refused, over MSG endpoints: each refused write ends its connection, and the client
# reads FI_SHUTDOWN while the negative acknowledgement is under way. The error is that of the refusal.
b() {
	slow_answers && signal slow || return 1
	with weft "$FIPEER" -s -p weft -d rxe0 -n 10 rejected "$(rxe_addr4)"
	status=$?
	answers_were_slow 10 && return $status
}
a() { await slow 60 && with weft "$FIPEER" -p weft -d rxe0 -n 10 rejected "$(peer_addr4)"; }
