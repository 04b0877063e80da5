# guest: pair
# kill-b: 3
# later: it runs nothing of weft
# The other guest is powered off during sends. With libfabric's verbs provider on rxe the survivor
# gets no event: the provider asks for 7 retries, and rxe (drivers/infiniband/sw/rxe/rxe_comp.c,
# COMPST_ERROR_RETRY) takes 7 as unlimited. This case shows that the power-off works: transfers
# complete before it, and none after it. weft must report the death: the pair-weft-killed cases.
b() { with verbs "$FIPEER" -s -p verbs -d rxe0 -T 60 survive "$(rxe_addr4)"; }
a() {
	survivor verbs send 3
	grep -q 'mode send: [1-9][0-9]* good' /tmp/survivor && grep -q '[1-9] sends and 16 receives left' /tmp/survivor
}
