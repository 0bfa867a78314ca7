package rolter

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// started is what the API calls the creation time of our models.
var started = time.Now().Unix()

// modelsPath recognises /v1/models, behind any prefix, and /v1/models/{model}.
func modelsPath(path string) (model string, ok bool) {
	if strings.HasSuffix(path, "/v1/models") || strings.HasSuffix(path, "/v1/models/") {
		return "", true
	}
	_, model, ok = strings.Cut(path, "/v1/models/")
	return model, ok
}

// serveModels lists the routes as the OpenAI API lists models, or shows one.
func (h *Handler) serveModels(w http.ResponseWriter, r *http.Request, model string) error {
	type object struct {
		ID      string `json:"id"`
		Object  string `json:"object"`
		Created int64  `json:"created"`
		OwnedBy string `json:"owned_by"`
	}
	describe := func(rt *Route) object { return object{rt.Model, "model", started, "rolter"} }
	var answer any
	if model == "" {
		list := struct {
			Object string   `json:"object"`
			Data   []object `json:"data"`
		}{Object: "list", Data: []object{}}
		for _, rt := range h.Routes {
			list.Data = append(list.Data, describe(rt))
		}
		answer = list
	} else {
		rt := h.routes[model]
		if rt == nil {
			return reject(w, r, apiError{http.StatusNotFound, "invalid_request_error", "model_not_found", "model", fmt.Sprintf("The model %s does not exist.", quoted(model))})
		}
		answer = describe(rt)
	}
	body, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	writeJSON(w, r, http.StatusOK, append(body, '\n'))
	return nil
}
