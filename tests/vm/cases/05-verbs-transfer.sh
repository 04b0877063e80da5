# later: it runs nothing of weft
# The tier's own program on libfabric's verbs provider: messages and RMA, every byte compared.
run() {
	fipeer_both verbs verbs 10.77.0.1 transfer && fipeer_both verbs verbs fd77::1 transfer
}
