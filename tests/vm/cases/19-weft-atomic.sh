# needs: weft
# The atomics of verbs, fetch-and-add and compare-and-swap of 8 bytes, from both sides of a
# connection. Receives of a shared context are in 20-weft-fabtests.
run() {
	fipeer_both weft weft 10.77.0.1 atomic
}
