# guest: pair
# seconds: 120
# later: it runs nothing of weft
# libfabric's verbs provider between two guests: fi_pingpong and the tier's own program, over IPv4
# and IPv6.
b() {
	pair_pingpong_server verbs v4 && pair_pingpong_server verbs v6 -6 &&
		pair_fipeer_server verbs "$(rxe_addr4)" 4 && pair_fipeer_server verbs "$(rxe_addr6)" 6
}
a() {
	pair_pingpong_client verbs "$(peer_addr4)" v4 && pair_pingpong_client verbs "$(peer_addr6)" v6 -6 &&
		pair_fipeer_client verbs "$(peer_addr4)" 4 && pair_fipeer_client verbs "$(peer_addr6)" 6
}
